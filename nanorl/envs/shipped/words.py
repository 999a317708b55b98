"""Common English words of five letters, for games with words.

Left out: rare words, plurals and forms that nobody would guess.
"""

from __future__ import annotations

_COMMON = """
about above actor adult after again agent agree ahead alarm album alert alive allow alone along
angel anger angle apart apple apply argue arise aside asset avoid awake award aware bacon badge
baker basic beach beard begin below bench berry birth black blade blame blank blast blaze blend
bless blind block blood bloom board boost bound brain brand brave bread break brick bride brief
bring broad brown brush build bunch cabin cable camel candy cargo carry catch cause chain chair
chalk charm chart chase cheap check cheek cheer chess chest chief child choir chose civil claim
class clean clear clerk click cliff climb clock close cloth cloud coach coast color comet comic
coral couch count court cover crack craft crane crash crazy cream crime cross crowd crown crust
curve cycle daily dance depth diary dirty doubt dozen draft drain drama dream dress drift drink
drive eager eagle early earth eight elbow elect empty enemy enjoy enter entry equal error event
exact exist extra faint faith false fancy fault feast fence fever field fifty fight final flame
flash fleet flesh float flood floor flour flute focus force forge frame fresh front frost fruit
funny ghost giant given glass globe glory glove grace grade grain grand grape grass great green
greet grief group guard guess guest guide habit happy harsh heart heavy hello honey honor horse
hotel house human humor ideal image index inner issue ivory jelly jewel joint judge juice knife
knock label large laser later laugh layer learn leave legal lemon level light limit linen liver
local logic loose lucky lunch magic major maple march match mayor medal melon mercy metal might
minor model money month moral motor mount mouse mouth movie music naked nerve never night noble
noise north novel nurse ocean offer often olive onion opera orbit order organ other ought outer
owner paint panel paper party patch peace peach pearl phase phone photo piano piece pilot pitch
place plain plane plant plate point polar pound power press price pride prime print prize proud
proof queen quick quiet quite radio raise ranch range rapid reach ready relax reply rider ridge
rifle right rival river robin robot rough round route royal rural salad sauce scale scene scent
scope score scout seven shade shake shape share sharp sheep sheet shelf shell shine shirt shock
shore short shout sight skill skirt sleep slice slide slope small smart smell smile smoke snake
solar solid solve sorry sound south space spare spark speak speed spend spice spite split spoon
sport staff stage stair stamp stand start state steam steel stick still stone store storm story
stove strip study stuff style sugar sunny super sweet swing sword table taste teach thank theme
there thick thing think third thorn three throw thumb tiger tight timer title toast today token
tooth topic total touch tough tower toxic trace track trade trail train treat trend trial tribe
trick truck trunk trust truth twice twist under union unity until upper upset urban usual valid
value vapor video virus visit vital vivid vocal voice wagon waste watch water weary wheat wheel
where white whole widow woman world worry worth wound wrist write wrong yacht yield young youth
zebra
"""

COMMON_WORDS: tuple[str, ...] = tuple(_COMMON.split())
SHORT_WORDS: tuple[str, ...] = COMMON_WORDS[::13]
"""Few, for models that spell badly."""
